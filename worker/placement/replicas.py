"""Build one replica of a model on given devices ("rooms") with one strategy, or say why that is impossible.

The bytes counted per device are the weights it holds and the activations of the tokens it processes at a
time. The device with the least memory left limits the number of tokens.

A replica's speed is predicted from arithmetic rate, memory and links. The prediction only has to rank plans,
so it covers what differs between them: small batches use a device badly, stages of unequal work wait for the
slowest, and collectives cost bandwidth and latency.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vectormill.models.model_shape import ModelShape
from vectormill.models.rounding import find_group_size
from vectormill.workers.plan_picture import format_gib
from worker.devices.device import BYTES_PER_SECOND, LATENCY_SECONDS
from worker.placement.footprint import COMPRESSED, VALUE_BYTES, make_footprint
from worker.placement.placement import Replica, Shard, Stage
from worker.placement.room import DeviceCapacity
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, REPLICATE, TENSOR

# The number of tokens at once at which a device reaches half of its rate. Measured on two CPU cores: 256
# tokens reach 70 % of the rate of 2,048 (docs/LOG.md); for GPUs the roofline's ridge is near 300 to 600
# tokens, and kernels need several waves.
HALF_RATE_TOKENS: Final = {"cpu": 128, "cuda": 1024, "mps": 512}
# A collective inside a layer also keeps the kernels before and after it from overlapping.
COLLECTIVES_PER_LAYER: Final = 2
WEIGHT_GATHERS_AHEAD: Final = 1
# Gathers run in parallel with the layers and take bandwidth and multiprocessors from them: a guess, not yet
# measured on GPUs.
OVERLAP_EFFICIENCY: Final = 0.85


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of a token: the arithmetic of all layers, and the bytes that one layer passes to the next."""

    flop_per_token: float
    num_layers: int
    hidden_bytes_per_token: int
    layer_weight_bytes: int


def device_rate(flops: float, kind: str, batch_tokens: float, cost: TokenCost) -> float:
    """Return the tokens per second of one device that holds all layers, for batches of `batch_tokens`."""
    saturation = batch_tokens / (batch_tokens + HALF_RATE_TOKENS[kind])
    return flops / cost.flop_per_token * saturation


def pipeline_rate(
    stage_rates: Sequence[float], micro_batches: int, micro_batch_tokens: float, link: str, cost: TokenCost
) -> float:
    """Return the tokens per second of a pipeline. `stage_rates` are each stage's rates for its own layers.

    With m micro-batches in flight through p stages, even the slowest stage is idle for (p-1)/(m+p-1) of the
    time. Source: Huang et al., GPipe (2019), section 2.3.
    """
    stages = len(stage_rates)
    handover = (
        LATENCY_SECONDS[link] + micro_batch_tokens * cost.hidden_bytes_per_token / BYTES_PER_SECOND[link]
    )
    seconds = [micro_batch_tokens / rate for rate in stage_rates]
    if micro_batches == 1:  # layers are split without pipelining, so one device works at a time
        return micro_batch_tokens / (sum(seconds) + handover * (stages - 1))
    slowest = max(seconds)
    whole = sum(seconds) + (micro_batches - 1) * slowest + handover * (stages - 1)
    return micro_batches * micro_batch_tokens / whole


def tensor_rate(flops: Sequence[float], kind: str, batch_tokens: float, link: str, cost: TokenCost) -> float:
    """Return the tokens per second of devices that split every layer, limited by the slowest device.

    Each layer adds two all-reduces. A ring all-reduce of b bytes over n devices moves 2·(n-1)/n·b through
    each link. Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """
    ranks = len(flops)
    compute = batch_tokens / (ranks * device_rate(min(flops), kind, batch_tokens, cost))
    moved = 2 * (ranks - 1) / ranks * batch_tokens * cost.hidden_bytes_per_token
    collective = 2 * LATENCY_SECONDS[link] + moved / BYTES_PER_SECOND[link]
    return batch_tokens / (compute + COLLECTIVES_PER_LAYER * cost.num_layers * collective)


def fully_sharded_rate(
    flops: Sequence[float], kind: str, batch_tokens: float, link: str, cost: TokenCost
) -> float:
    """Return the tokens per second of devices that encode different batches and gather weights per layer.

    The next layer is gathered while one is computed, so the slower of the two counts. Source: Zhao et al.,
    PyTorch FSDP (2023), section 3.3.
    """
    ranks = len(flops)
    rank_tokens = batch_tokens / ranks
    alone = rank_tokens / device_rate(min(flops), kind, rank_tokens, cost) / cost.num_layers
    compute = alone / OVERLAP_EFFICIENCY
    gathered = (ranks - 1) / ranks * cost.layer_weight_bytes
    gather = LATENCY_SECONDS[link] + gathered / BYTES_PER_SECOND[link]
    seconds = cost.num_layers * max(compute, gather) + WEIGHT_GATHERS_AHEAD * gather
    return batch_tokens / seconds


# Four micro-batches per stage keep the bubble (p-1)/(5p-1) at or below a fifth; more would only add latency.
MICRO_BATCHES_PER_STAGE: Final = 4
# The next layer is gathered while one is computed. The embeddings are gathered too, into a buffer and from
# there into parameters, so they count twice as well.
GATHERED_UNITS: Final = 2
# The hidden states that a stage holds besides the micro-batch in progress: the waiting one and the one being
# sent.
WAITING_MICRO_BATCHES: Final = 2


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """The reason why no replica fits.

    `missing_bytes` is the total over all of its devices; 0 if memory is not the reason.
    """

    reason: str
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MinimumNeeds:
    """The minimum for every replica: memory for one text of `max_tokens`.

    Memory beyond a batch of `full_batch_tokens` brings nothing; with less, a replica is slower and is rated
    so.
    """

    precision: str  # of the weights
    arithmetic: str  # of activations and uncompressed weights
    attention: str  # the kernel's name, as in an EncoderReport
    max_tokens: int
    full_batch_tokens: int
    sharing_obstacle: str = ""
    tensor_obstacle: str = ""


def find_parts_of_one_card(rooms: Sequence[DeviceCapacity]) -> list[str]:
    """Return the names of devices that are parts of one GPU; empty if no two of them are."""
    cards: dict[str, list[str]] = {}
    for room in rooms:
        if room.card:
            cards.setdefault(room.card, []).append(room.name)
    return next((names for names in cards.values() if len(names) > 1), [])


class ReplicaBuilder:
    """A builder of replicas of one model on given devices, which caches what it has built."""

    def __init__(self, shape: ModelShape, needs: MinimumNeeds) -> None:
        arithmetic = needs.arithmetic
        footprint = make_footprint(shape, needs.precision, needs.attention, arithmetic=arithmetic)
        self._shape = shape
        self._needs = needs
        self._built: dict[tuple[str, tuple[DeviceCapacity, ...], str], Replica | DoesNotFit] = {}
        self._first_bytes = footprint.embedding_bytes
        self._layer_bytes = max(footprint.layer_bytes, default=0)
        self._last_bytes = footprint.other_bytes
        self._made_bytes = footprint.num_layers * footprint.made_bytes
        self._bias_bytes = footprint.bias_bytes
        self.weight_bytes = footprint.weight_bytes
        self.max_tokens = needs.max_tokens
        self.sharing_obstacle = needs.sharing_obstacle
        # A batch of texts of the maximum length needs the most memory.
        squared = footprint.attention_bytes_per_token_squared * needs.max_tokens
        once = -(-footprint.bytes_per_sequence // needs.max_tokens)
        self._token_bytes = footprint.activation_bytes_per_token + squared + once
        # The memory of an unshared replica with a full batch.
        self.full_bytes = self.weight_bytes + self._bias_bytes + needs.full_batch_tokens * self._token_bytes
        self._hidden_bytes = shape.hidden_size * int(VALUE_BYTES[arithmetic])
        self.cost = TokenCost(
            flop_per_token=shape.flop_per_token,
            num_layers=shape.num_layers,
            hidden_bytes_per_token=self._hidden_bytes,
            layer_weight_bytes=self._layer_bytes,
        )

    def build(self, strategy: str, rooms: Sequence[DeviceCapacity], link: str) -> Replica | DoesNotFit:
        """Return a replica over all rooms by this strategy. `link` is the kind of their slowest link."""
        # The same group occurs in many of the compared plans.
        asked = (strategy, tuple(rooms), link)
        if asked not in self._built:
            self._built[asked] = self._build(strategy, rooms, link)
        return self._built[asked]

    def _build(self, strategy: str, rooms: Sequence[DeviceCapacity], link: str) -> Replica | DoesNotFit:
        if strategy == REPLICATE:
            return self._build_alone(rooms[0])
        if self._needs.sharing_obstacle:
            return DoesNotFit(self._needs.sharing_obstacle)
        if parts := find_parts_of_one_card(rooms):
            return DoesNotFit(f"{' and '.join(parts)} are parts of one GPU (MIG), which NCCL cannot connect")
        builders = {
            PIPELINE: self._build_stages,
            TENSOR: self._build_tensor,
            FULLY_SHARDED: self._build_fully_sharded,
        }
        if strategy not in builders:
            raise ValueError(f"Unknown strategy for sharing a replica: {strategy!r}.")
        return builders[strategy](rooms, link)

    def full_rate(self, room: DeviceCapacity) -> float:
        """Return the device's tokens per second if the weights and a full batch fit."""
        return device_rate(room.flops, room.kind, self._needs.full_batch_tokens, self.cost)

    def _build_alone(self, room: DeviceCapacity) -> Replica | DoesNotFit:
        tokens = self._tokens_in(room.capacity_bytes - self.weight_bytes, self._token_bytes)
        if tight := self._refuse(room, self.weight_bytes, tokens, self._token_bytes):
            return tight
        shard = self._make_shard(room, self.weight_bytes, tokens * self._token_bytes)
        stage = Stage(0, self._shape.num_layers, (shard,))
        return Replica(REPLICATE, (stage,), 1, tokens, device_rate(room.flops, room.kind, tokens, self.cost))

    def _build_stages(self, rooms: Sequence[DeviceCapacity], link: str) -> Replica | DoesNotFit:
        per_token = self._token_bytes + WAITING_MICRO_BATCHES * self._hidden_bytes
        counts = self._split_layers(rooms, self._bias_bytes + self._needs.max_tokens * per_token)
        if isinstance(counts, DoesNotFit):
            return counts
        weights = [count * self._layer_bytes for count in counts]
        weights[0] += self._first_bytes
        weights[-1] += self._last_bytes
        tokens = min(
            self._tokens_in(room.capacity_bytes - held, per_token)
            for room, held in zip(rooms, weights, strict=True)
        )
        micro_batches = MICRO_BATCHES_PER_STAGE * len(rooms)
        rates = [
            device_rate(room.flops, room.kind, tokens, self.cost) * self._shape.num_layers / count
            for room, count in zip(rooms, counts, strict=True)
        ]
        stages, first = [], 0
        for room, count, held in zip(rooms, counts, weights, strict=True):
            shard = self._make_shard(room, held, tokens * per_token)
            stages.append(Stage(first, count, (shard,)))
            first += count
        rate = pipeline_rate(rates, micro_batches, tokens, link, self.cost)
        return Replica(PIPELINE, tuple(stages), micro_batches, micro_batches * tokens, rate)

    def _build_tensor(self, rooms: Sequence[DeviceCapacity], link: str) -> Replica | DoesNotFit:
        ranks = len(rooms)
        if self._needs.tensor_obstacle:
            return DoesNotFit(self._needs.tensor_obstacle)
        divisors = tensor_parallel_sizes(self._shape)
        if ranks not in divisors:
            there = ", ".join(str(divisor) for divisor in divisors)
            return DoesNotFit(
                f"{self._shape.num_key_value_heads} key heads are not divisible by {ranks}, only by {there}"
            )
        if tight := self._refuse_cut_groups(ranks):
            return tight
        layers = self._shape.num_layers * self._layer_bytes
        held = self._first_bytes + self._last_bytes + -(-layers // ranks)
        # Every rank holds complete hidden states; activations between column and row splits are divided.
        residual = min(self._token_bytes, 4 * self._hidden_bytes)
        per_token = residual + -(-(self._token_bytes - residual) // ranks)
        ranks_held = self._hold_ranks(rooms, held, per_token)
        if isinstance(ranks_held, DoesNotFit):
            return ranks_held
        stage, tokens = ranks_held
        rate = tensor_rate([room.flops for room in rooms], rooms[0].kind, tokens, link, self.cost)
        return Replica(TENSOR, (stage,), 1, tokens, rate)

    def _refuse_cut_groups(self, ranks: int) -> DoesNotFit | None:
        """Refuse cuts through quantization groups of compressed matrices: they would change values."""
        precision, shape = self._needs.precision, self._shape
        if precision not in COMPRESSED:
            return None
        for inputs in (shape.num_heads * shape.head_size, shape.intermediate_size):
            size = find_group_size(inputs)
            if (inputs // ranks) % size:
                return DoesNotFit(
                    f"splitting {inputs:,} inputs of a matrix among {ranks} devices breaks groups of {size} "
                    f"{precision} weights that share a scale"
                )
        return None

    def _build_fully_sharded(self, rooms: Sequence[DeviceCapacity], link: str) -> Replica | DoesNotFit:
        gathered = GATHERED_UNITS * max(self._layer_bytes, self._first_bytes)
        cut = self.weight_bytes - self._made_bytes
        held = -(-cut // len(rooms)) + self._made_bytes + gathered
        ranks_held = self._hold_ranks(rooms, held, self._token_bytes)
        if isinstance(ranks_held, DoesNotFit):
            return ranks_held
        stage, tokens = ranks_held
        batch_tokens = tokens * len(rooms)  # each rank encodes different texts
        rate = fully_sharded_rate(
            [room.flops for room in rooms], rooms[0].kind, batch_tokens, link, self.cost
        )
        return Replica(FULLY_SHARDED, (stage,), 1, batch_tokens, rate)

    def _hold_ranks(
        self, rooms: Sequence[DeviceCapacity], held: int, per_token: int
    ) -> tuple[Stage, int] | DoesNotFit:
        """Return one stage over all devices and its tokens.

        Each holds the same; the smallest sets the tokens.
        """
        smallest = min(rooms, key=lambda room: room.capacity_bytes)
        tokens = self._tokens_in(smallest.capacity_bytes - held, per_token)
        if tight := self._refuse(smallest, held, tokens, per_token, num_rooms=len(rooms)):
            return tight
        shards = tuple(self._make_shard(room, held, tokens * per_token) for room in rooms)
        return Stage(0, self._shape.num_layers, shards), tokens

    def _split_layers(self, rooms: Sequence[DeviceCapacity], batch_bytes: int) -> list[int] | DoesNotFit:
        """Return the number of consecutive layers for each device.

        Each next layer goes to the device with memory left that would finish its share first; if two tie, to
        the one with more memory left. With layers of equal cost this gives the split whose slowest stage is
        fastest.
        """
        num_layers = self._shape.num_layers
        if len(rooms) > num_layers:
            return DoesNotFit(f"{num_layers} layers cannot be split into {len(rooms)} stages")
        left = [room.capacity_bytes - batch_bytes for room in rooms]
        left[0] -= self._first_bytes
        left[-1] -= self._last_bytes
        counts = [0] * len(rooms)
        for layer in range(num_layers):
            fits = [place for place in range(len(rooms)) if left[place] >= self._layer_bytes]
            # Every stage needs a layer: the last layers go to stages that have none yet.
            empty = [place for place in range(len(rooms)) if counts[place] == 0]
            if len(empty) == num_layers - layer:
                fits = [place for place in fits if counts[place] == 0]
            if not fits:
                missing = (num_layers - layer) * self._layer_bytes + sum(-room for room in left if room < 0)
                return DoesNotFit(
                    f"{len(rooms)} stages lack {format_gib(missing)} for the weights and a text of "
                    f"{self._needs.max_tokens:,} tokens",
                    missing,
                )
            best = min(fits, key=lambda place: ((counts[place] + 1) / rooms[place].flops, -left[place]))
            counts[best] += 1
            left[best] -= self._layer_bytes
        return counts

    def _make_shard(self, room: DeviceCapacity, held: int, token_bytes: int) -> Shard:
        return Shard(room.name, room.capacity_bytes, held, self._bias_bytes + token_bytes)

    def _tokens_in(self, free_bytes: int, per_token: int) -> int:
        return max(0, min(self._needs.full_batch_tokens, (free_bytes - self._bias_bytes) // per_token))

    def _refuse(
        self, room: DeviceCapacity, held: int, tokens: int, per_token: int, num_rooms: int = 1
    ) -> DoesNotFit | None:
        wanted = held + self._bias_bytes + self._needs.max_tokens * per_token
        if tokens >= self._needs.max_tokens:
            return None
        missing = wanted - room.capacity_bytes
        weights = "the weights" if held == self.weight_bytes else "their shares of the weights"
        if held > room.capacity_bytes:
            room_bytes = format_gib(room.capacity_bytes)
            what = f"{weights}, {format_gib(held)}, exceed the {room_bytes} of {room.name}"
        else:
            share = held / room.capacity_bytes
            what = f"{weights} take {share:.0%} of {room.name} and leave room for {tokens:,} tokens"
        each = " on each device" if num_rooms > 1 else ""
        return DoesNotFit(
            f"{what}; a text of {self._needs.max_tokens:,} tokens needs {format_gib(missing)} more{each}",
            missing * num_rooms,
        )


def tensor_parallel_sizes(shape: ModelShape) -> list[int]:
    """Return the numbers of ranks that divide the heads, which stay whole, and the intermediate size."""
    return [
        ranks
        for ranks in range(1, shape.num_key_value_heads + 1)
        if shape.num_heads % ranks
        == shape.num_key_value_heads % ranks
        == shape.intermediate_size % ranks
        == 0
    ]
