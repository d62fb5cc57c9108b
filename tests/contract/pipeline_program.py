"""A stage of a simulated pipeline: `python -m tests.contract.pipeline_program NUMBER WORLD MICRO_BATCHES MEETING`.

Its device is a pause of known length, so that the bubble that is left is the pipeline's own. Prints, as JSON, how long
the stage computed and how long it was there for.
"""

import json
import sys
import time
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.pipeline import PipelineStage
from worker.parallel.shard_encoder import join_process_group
from worker.placement.placement import PIPELINE
from worker.placement.rank import Rank

STAGE_SECONDS: Final = 0.05
SHAPE: Final = (4, 16, 32)  # hidden states [n, length, hidden size] of a micro-batch


def main() -> None:
    number, world_size, micro_batches = (int(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    rank = Rank(number, world_size, PIPELINE, (1,) * world_size, micro_batches, Path(sys.argv[4]), 60.0)
    join_process_group(rank, "gloo")

    def compute(place: int, hidden_states: Tensor | None) -> Tensor:
        time.sleep(STAGE_SECONDS)  # the simulated device
        return torch.full(SHAPE, float(place)) if hidden_states is None else hidden_states + 1

    stage = PipelineStage(rank, torch.float32, torch.device("cpu"))
    stage.run([SHAPE], compute)  # opens the connections
    dist.barrier()
    stage = PipelineStage(rank, torch.float32, torch.device("cpu"))
    results = stage.run([SHAPE] * micro_batches, compute)
    values = [float(result.mean()) for result in results]
    clock = stage.clock
    sys.stdout.write(json.dumps({"busy": clock.busy_seconds, "wall": clock.wall_seconds, "values": values}))


if __name__ == "__main__":
    main()
