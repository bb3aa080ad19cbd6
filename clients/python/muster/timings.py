"""Where the time of steps went, as a table."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, Iterator, List, Sequence

from .v1 import job_pb2

PHASES = ("data", "forward", "backward", "communicate", "wait", "optimizer", "snapshot")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One report of one worker. Times are seconds per step; `wait` is for others while nothing moved."""

    worker: str
    rank: int
    generation: int
    step: int  # boundary reached
    steps: int  # summed up in the report
    leaves: int  # that this worker computed in them
    tokens: int  # global tokens trained in them
    loss: float
    total: float
    data: float
    forward: float
    backward: float
    communicate: float
    wait: float
    optimizer: float
    snapshot: float

    @classmethod
    def from_pb(cls, pb: job_pb2.Timing) -> "Timing":
        scale = 1e-6 / (pb.step_count or 1)
        return cls(worker=pb.worker, rank=pb.rank, generation=pb.generation, step=pb.steps_done, steps=pb.step_count,
                   leaves=pb.leaf_count, tokens=pb.tokens, loss=pb.loss, total=pb.total_us * scale,
                   **{phase: getattr(pb, phase + "_us") * scale for phase in PHASES})


class Timings(Sequence[Timing]):
    """Rows, of each worker the newest first. `print` shows a table; `pandas.DataFrame(timings.columns())` makes one of pandas."""

    def __init__(self, rows: Iterable[Timing]):
        self._rows: List[Timing] = list(rows)

    def __getitem__(self, index: Any) -> Any:
        return Timings(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Timing]:
        return iter(self._rows)

    def columns(self) -> Dict[str, List[Any]]:
        return {field.name: [getattr(row, field.name) for row in self._rows] for field in dataclasses.fields(Timing)}

    def slowest(self) -> Timing:
        """The row whose worker computed longest: with the least time spent waiting for others."""
        return max(self._rows, key=lambda row: row.total - row.wait)

    def __str__(self) -> str:
        heading = ["worker", "rank", "step", "steps", "leaves", "total", *PHASES]
        cells = [heading] + [[row.worker, str(row.rank), str(row.step), str(row.steps), str(row.leaves),
                              *(f"{getattr(row, name) * 1e3:.2f}ms" for name in ("total", *PHASES))] for row in self._rows]
        widths = [max(len(line[i]) for line in cells) for i in range(len(heading))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)
