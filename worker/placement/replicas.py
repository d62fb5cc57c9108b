"""Build one replica of a model on given devices with one strategy, or say why that is impossible.

What each device needs is told by its footprint (worker.placement.footprint); the device with the least memory
left limits the number of tokens.

A replica's speed is predicted from arithmetic rate, memory and links. The prediction only has to rank plans,
so it covers what differs between them: small batches use a device badly, stages of unequal work wait for the
slowest, and collectives cost bandwidth and latency.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Final

from vectormill.models.model_shape import ModelShape
from vectormill.workers.plan_picture import format_gib
from worker.devices.backends import BACKENDS
from worker.devices.device import BYTES_PER_SECOND, CPU, CUDA, LATENCY_SECONDS, MPS, PCIE
from worker.placement.capacity import DeviceCapacity
from worker.placement.footprint import (
    COMPRESSED,
    VALUE_BYTES,
    Footprint,
    ModelShare,
    count_weights,
    list_shares,
    make_footprint,
)
from worker.placement.obstacles import find_division_obstacle
from worker.placement.placement import PlanSettings, Replica, Shard, Stage
from worker.placement.strategies import (
    FULLY_SHARDED,
    NUM_SLOTS,
    OFFLOAD,
    PIPELINE,
    REPLICATE,
    STRATEGIES,
    TENSOR,
)

# The number of tokens at once at which a device reaches half of its rate. Measured on two CPU cores: 256
# tokens reach 70 % of the rate of 2,048; for GPUs the roofline's ridge is near 300 to 600
# tokens, and kernels need several waves.
HALF_RATE_TOKENS: Final = {"cpu": 128, "cuda": 1024, "mps": 512}
# A collective inside a layer also keeps the kernels before and after it from overlapping.
COLLECTIVES_PER_LAYER: Final = 2
WEIGHT_GATHERS_AHEAD: Final = 1
# Gathers run in parallel with the layers and take bandwidth and multiprocessors from them: a guess, not yet
# measured on GPUs.
OVERLAP_EFFICIENCY: Final = 0.85


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """The reason why no replica fits.

    `missing_bytes` is the total over all of its devices; 0 if memory is not the reason. `longest_text_tokens` is the
    longest text for which a replica would fit, in steps of 512 tokens; 0 if there is none.
    """

    reason: str
    missing_bytes: int = 0
    longest_text_tokens: int = 0


# A replica for shorter texts is useless, unless the model reads no longer ones. Longer ones are tried in such steps.
SHORTEST_USEFUL_TOKENS: Final = 512

# The number of tokens at once beyond which a device gets no faster (docs/LOG.md for CPUs).
FULL_BATCH_TOKENS: Final[Mapping[str, int]] = {CPU: 2048, CUDA: 32768, MPS: 8192}
# The default arithmetic of encoders, used when weights are compressed.
ARITHMETIC: Final[Mapping[str, str]] = {CPU: "fp32", CUDA: "bf16", MPS: "fp16"}
# The attention assumed if none is given. It is padded on CUDA too: a shard pads unless packing is requested,
# and so does a whole replica whose model cannot be packed; otherwise less memory is needed.
ATTENTION: Final[Mapping[str, str]] = {
    kind: next(each.attention for each in BACKENDS.values() if each.runs_on(kind))
    for kind in (CPU, CUDA, MPS)
}


class ReplicaBuilder:
    """A builder of replicas of one model on devices of one kind, each with memory for one text of the maximum length.

    Memory beyond a full batch brings nothing; with less, a replica is slower and is rated so. What the builder finds
    out about devices also holds for devices that are alike, which compare as equal.
    """

    def __init__(self, shape: ModelShape, settings: PlanSettings, kind: str) -> None:
        self._arithmetic = ARITHMETIC[kind] if settings.precision in COMPRESSED else settings.precision
        value_bytes = int(VALUE_BYTES[self._arithmetic])
        self._shape = shape
        self._settings = settings
        self._attention = settings.attention or ATTENTION[kind]
        self.max_tokens = settings.max_tokens
        self._full_batch_tokens = settings.full_batch_tokens or max(FULL_BATCH_TOKENS[kind], self.max_tokens)
        self.weights = count_weights(shape, settings.precision, value_bytes)
        find_obstacle = settings.find_obstacle or partial(find_division_obstacle, shape)
        self.find_obstacle = partial(find_obstacle, precision=settings.precision)
        self._state_bytes = shape.hidden_size * value_bytes  # of a token, which one layer passes to the next
        self._layer_bytes = max(self.weights.layer_bytes, default=0)
        self.predict = cache(self._predict)
        self._find_longest_text = cache(self._bisect_texts)
        self._split_layers = cache(self._share_out_layers)

    def _predict(self, share: ModelShare, kind: str, memory_bytes: int) -> Footprint:
        """Return the memory needs of a share of the model on a device of this kind and memory."""
        return make_footprint(
            self._shape,
            self._settings.precision,
            self._attention,
            arithmetic=self._arithmetic,
            share=share,
            kind=kind,
            memory_bytes=memory_bytes,
            results=self._settings.results,
        )

    def count_full_bytes(self, device: DeviceCapacity) -> int:
        """Return the memory of an unshared replica with a full batch."""
        footprint = self.predict(ModelShare(), device.kind, device.memory_bytes)
        rows = self._count_full_rows(self.max_tokens)
        return footprint.weight_bytes + footprint.predict_batch_bytes(rows, self.max_tokens)

    def full_rate(self, device: DeviceCapacity) -> float:
        """Return the device's tokens per second if the weights and a full batch fit."""
        return self._rate_alone(device, self._full_batch_tokens)

    def _count_full_rows(self, tokens: int) -> int:
        """Return the number of texts of the maximum length in a full batch; they need the most memory."""
        return -(-self._full_batch_tokens // tokens)

    def build(self, strategy: str, devices: tuple[DeviceCapacity, ...], link: str) -> Replica | DoesNotFit:
        """Return a replica over all devices by this strategy. `link` is the kind of their slowest link."""
        if obstacle := self.find_obstacle(strategy, devices):
            return DoesNotFit(obstacle)
        built = self._build(strategy, devices, link, self.max_tokens)
        if isinstance(built, Replica):
            return built
        return replace(built, longest_text_tokens=self._find_longest_text(strategy, devices))

    def _bisect_texts(self, strategy: str, devices: tuple[DeviceCapacity, ...]) -> int:
        """Return the longest text, shorter than the maximum, for which a replica fits; 0 if there is none."""
        shorter = range(SHORTEST_USEFUL_TOKENS, self.max_tokens, SHORTEST_USEFUL_TOKENS)
        num_fitting = bisect_right(
            shorter,
            False,
            key=lambda tokens: isinstance(self._build(strategy, devices, PCIE, tokens), DoesNotFit),
        )
        return shorter[num_fitting - 1] if num_fitting else 0

    def _build(
        self, strategy: str, devices: tuple[DeviceCapacity, ...], link: str, max_tokens: int
    ) -> Replica | DoesNotFit:
        """Return a replica that holds a text of `max_tokens`, whatever obstacles there are but memory."""
        counts = [self._shape.num_layers]
        if strategy == OFFLOAD:
            return self._offload(devices, link, max_tokens)
        if strategy == PIPELINE:
            divided = self._split_layers(devices, max_tokens)
            if isinstance(divided, DoesNotFit):
                return divided
            counts = divided
        return self._hold(strategy, devices, link, max_tokens, counts)

    def _offload(
        self, devices: tuple[DeviceCapacity, ...], link: str, max_tokens: int
    ) -> Replica | DoesNotFit:
        """Return a replica with as many layers in main memory as make it fastest: they leave room for batches."""
        num_layers, (device,) = self._shape.num_layers, devices
        numbers = range(2 * NUM_SLOTS, num_layers + 1, NUM_SLOTS)  # with fewer, nothing is gained
        if not numbers:
            return DoesNotFit(f"the model has {num_layers} layers, too few to keep some in main memory")
        fitting = [number for number in numbers if number * self._layer_bytes <= device.host_bytes]
        if not fitting:
            needed = numbers[0] * self._layer_bytes
            return DoesNotFit(
                f"main memory has room for {format_gib(device.host_bytes)} of layers beside {device.name}",
                needed - device.host_bytes,
            )
        built = [self._hold(OFFLOAD, devices, link, max_tokens, [num_layers], number) for number in fitting]
        replicas = [each for each in built if isinstance(each, Replica)]
        return max(replicas, key=lambda each: each.relative_rate) if replicas else built[-1]

    def _hold(
        self,
        strategy: str,
        devices: tuple[DeviceCapacity, ...],
        link: str,
        max_tokens: int,
        counts: Sequence[int],
        num_offloaded: int = 0,
    ) -> Replica | DoesNotFit:
        """Return a replica whose stages have so many layers, of which some are in main memory."""
        shares = list_shares(strategy, counts, len(devices), num_offloaded)
        needs = [
            self.predict(share, device.kind, device.memory_bytes)
            for share, device in zip(shares, devices, strict=True)
        ]
        host_bytes = num_offloaded * self._layer_bytes
        left = [
            device.capacity_bytes - need.weight_bytes for device, need in zip(devices, needs, strict=True)
        ]
        num_rows = min(
            need.largest_batch_tokens(free, max_tokens) // max_tokens
            for need, free in zip(needs, left, strict=True)
        )
        if num_rows < 1:
            return self._refuse(devices, needs, max_tokens)
        num_rows = min(num_rows, self._count_full_rows(max_tokens))
        tokens = min(num_rows * max_tokens, self._full_batch_tokens)
        shards = [
            Shard(
                device.name,
                device.capacity_bytes,
                need.weight_bytes,
                need.predict_batch_bytes(num_rows, max_tokens),
                host_bytes,
            )
            for device, need in zip(devices, needs, strict=True)
        ]
        stages = [Stage(0, counts[0], tuple(shards))]
        if strategy == PIPELINE:
            firsts = accumulate(counts, initial=0)
            stages = [Stage(*each[:2], (each[2],)) for each in zip(firsts, counts, shards, strict=False)]
        batch_tokens = tokens * (len(devices) if STRATEGIES[strategy].divides_batches else 1)
        rate = self._rate(strategy, devices, counts, batch_tokens, link)
        if num_offloaded:  # layers arrive while others are computed
            rate = min(rate, batch_tokens / (host_bytes / BYTES_PER_SECOND[PCIE]))
        return Replica(strategy, tuple(stages), batch_tokens, rate, num_offloaded=num_offloaded)

    def _rate_alone(self, device: DeviceCapacity, tokens: float) -> float:
        """Return the tokens per second of one device that holds all layers, for batches of so many tokens."""
        saturation = tokens / (tokens + HALF_RATE_TOKENS[device.kind])
        return device.flops / self._shape.flop_per_token * saturation

    def _rate(
        self, strategy: str, devices: Sequence[DeviceCapacity], counts: Sequence[int], tokens: int, link: str
    ) -> float:
        """Return the tokens per second of a replica for batches of so many tokens."""
        num_layers, ranks = self._shape.num_layers, len(devices)
        rates = [self._rate_alone(device, tokens) for device in devices]
        if strategy in (REPLICATE, OFFLOAD):
            return rates[0]
        latency, bytes_per_second = LATENCY_SECONDS[link], BYTES_PER_SECOND[link]
        if strategy == TENSOR:
            # Each layer adds two all-reduces. A ring all-reduce of b bytes over n devices moves 2·(n-1)/n·b through
            # each link. Source: Shoeybi et al., Megatron-LM (2019), section 3.
            moved = 2 * (ranks - 1) / ranks * tokens * self._state_bytes
            collective = 2 * latency + moved / bytes_per_second
            return tokens / (tokens / (ranks * min(rates)) + COLLECTIVES_PER_LAYER * num_layers * collective)
        if strategy == FULLY_SHARDED:
            # Each rank encodes different texts. The next layer is gathered while one is computed, so the slower of the
            # two counts. Source: Zhao et al., PyTorch FSDP (2023), section 3.3.
            own_tokens = tokens / ranks
            slowest = min(self._rate_alone(device, own_tokens) for device in devices)
            compute = own_tokens / slowest / num_layers / OVERLAP_EFFICIENCY
            gather = latency + (ranks - 1) / ranks * self._layer_bytes / bytes_per_second
            return tokens / (num_layers * max(compute, gather) + WEIGHT_GATHERS_AHEAD * gather)
        # Each stage works at another batch, so the slowest sets the pace, and nobody waits but at the start and the
        # end of all work.
        slowest = min(rate * num_layers / count for rate, count in zip(rates, counts, strict=True))
        return tokens / (tokens / slowest + latency + tokens * self._state_bytes / bytes_per_second)

    def _share_out_layers(
        self, devices: tuple[DeviceCapacity, ...], max_tokens: int
    ) -> list[int] | DoesNotFit:
        """Return the number of consecutive layers for each device.

        Each next layer goes to the device with memory left that would finish its share first; if two tie, to
        the one with more memory left. With layers of equal cost this gives the split whose slowest stage is
        fastest.
        """
        num_layers, layer_bytes = self._shape.num_layers, self._layer_bytes
        # What a batch takes does not depend on the number of layers, but of models that keep the results of all.
        middle = ModelShare(PIPELINE, len(devices), num_layers, is_first=False, answers=False)
        batch_bytes = [
            self.predict(middle, device.kind, device.memory_bytes).predict_batch_bytes(1, max_tokens)
            for device in devices
        ]
        left = [
            device.capacity_bytes - self.weights.common_bytes - taken
            for device, taken in zip(devices, batch_bytes, strict=True)
        ]
        left[0] -= self.weights.embedding_bytes
        left[-1] -= self.weights.other_bytes
        counts = [0] * len(devices)
        for layer in range(num_layers):
            fits = [place for place in range(len(devices)) if left[place] >= layer_bytes]
            # Every stage needs a layer: the last layers go to stages that have none yet.
            empty = [place for place in range(len(devices)) if counts[place] == 0]
            if len(empty) == num_layers - layer:
                fits = [place for place in fits if counts[place] == 0]
            if not fits:
                missing = (num_layers - layer) * layer_bytes + sum(-free for free in left if free < 0)
                return DoesNotFit(
                    f"{len(devices)} stages lack {format_gib(missing)} for the weights and a text of "
                    f"{max_tokens:,} tokens",
                    missing,
                )
            best = min(fits, key=lambda place: ((counts[place] + 1) / devices[place].flops, -left[place]))
            counts[best] += 1
            left[best] -= layer_bytes
        return counts

    @staticmethod
    def _refuse(devices: Sequence[DeviceCapacity], needs: Sequence[Footprint], max_tokens: int) -> DoesNotFit:
        """Return by how much a text of the maximum length does not fit, on the device that lacks most."""
        missing = [
            need.weight_bytes + need.predict_batch_bytes(1, max_tokens) - device.capacity_bytes
            for device, need in zip(devices, needs, strict=True)
        ]
        place = max(range(len(devices)), key=missing.__getitem__)
        device, need = devices[place], needs[place]
        weights = "the weights" if len(devices) == 1 else "their shares of the weights"
        held = format_gib(need.weight_bytes)
        if need.weight_bytes > device.capacity_bytes:
            what = f"{weights}, {held}, exceed the {format_gib(device.capacity_bytes)} of {device.name}"
        else:
            longest = need.longest_text(device.capacity_bytes - need.weight_bytes, max_tokens)
            taken = need.weight_bytes / device.capacity_bytes
            left = f"room for a text of {longest:,} tokens" if longest else "no room for a text"
            what = f"{weights} take {taken:.0%} of {device.name} and leave {left}"
        each = " on each device" if len(devices) > 1 else ""
        return DoesNotFit(
            f"{what}; a text of {max_tokens:,} tokens needs {format_gib(missing[place])} more{each}",
            sum(each for each in missing if each > 0),
        )
