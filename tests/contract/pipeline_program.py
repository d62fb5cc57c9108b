"""A stage of simulated pipelines: `python -m tests.contract.pipeline_program NUMBER MEETING WORLD:MICRO_BATCHES...`.

It takes its part in one pipeline after the other, unless its number is beyond the world. Its device is a pause of known
length, so that the bubble that is left is the pipeline's own. Prints for each pipeline, as a line of JSON, how long the
stage computed and how long it was there for.
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
    number, meeting = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    for place, pipeline in enumerate(sys.argv[3:]):
        world_size, micro_batches = map(int, pipeline.split(":"))
        if number < world_size:
            rank = Rank(
                number,
                world_size,
                PIPELINE,
                (1,) * world_size,
                micro_batches,
                meeting.with_name(f"{meeting.name}-{place}"),
                60.0,
            )
            run_stage(rank, micro_batches)


def run_stage(rank: Rank, micro_batches: int) -> None:
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
    said = {"busy": clock.busy_seconds, "wall": clock.wall_seconds, "values": values}
    sys.stdout.write(json.dumps(said) + "\n")
    dist.barrier()  # nobody leaves while another still waits for what it sent
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
