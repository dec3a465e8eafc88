"""A process that writes records: python reporting_writer.py FOLDER FIRST COUNT [NAME …]

Writes the records of seeds FIRST … FIRST + COUNT - 1 below FOLDER, then one record under each NAME, which other
processes want, too. Prints a line for each record written; exit code 2 where one was refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting.record import write_record


def main(folder: Path, first: int, count: int, names: list[str]) -> int:
    refused = 0
    own = [(seed, f"{seed}.json") for seed in range(first, first + count)]
    for seed, name in [*own, *((first, name) for name in names)]:
        try:
            path = write_record(record(seed=seed, notes=["x" * 20_000]), folder, name)
        except UserError as error:
            print(error, file=sys.stderr, flush=True)
            refused = 2
        else:
            print(path.name, flush=True)
    return refused


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
