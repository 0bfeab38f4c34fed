"""Run logs of a hundred thousand steps in a second: 1024 real steps, copied inside the file."""
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from f16lab.events import Histogram, StepRecord
from f16lab.runfile import BLOCK
from f16lab.runlog import RunLog

PIECE = 1024


def long_log(path: Path, pieces: int, histograms: Sequence[Histogram] = ()) -> None:
    """A log of `pieces` × 1024 steps with a spike of 40 in the loss; histograms at every 16th step."""
    with RunLog(path) as log:
        for k in range(PIECE + 1):  # the one more makes the last block be written
            loss = 40.0 if k == 700 else 1 + math.sin(k / 99)
            log(StepRecord(k, loss, 2048, 1.0, 1e-3, 65536.0, histograms=tuple(histograms) if k % 16 == 0 else ()))
    db = sqlite3.connect(path, isolation_level=None)
    assert PIECE % BLOCK == 0 and db.execute("SELECT count(*) FROM block").fetchone()[0] == PIECE // BLOCK
    db.execute("BEGIN")
    for table in ("step", "histogram"): db.execute(f"DELETE FROM {table} WHERE step = ?", (PIECE,))
    looks, = db.execute("SELECT coalesce(max(seq), 0) FROM histogram").fetchone()
    for i in range(1, pieces):
        first, block = i * PIECE, i * PIECE // BLOCK
        db.execute("INSERT INTO step SELECT seq + ?, step + ?, session, layout, casts, body FROM step WHERE step < ?", (first, first, PIECE))
        db.execute("INSERT INTO histogram SELECT seq + ?, step + ?, layout, body FROM histogram WHERE step < ?", (i * looks, first, PIECE))
        db.execute("INSERT INTO block SELECT number + ?, layout, body FROM block WHERE number < ?", (block, PIECE // BLOCK))
        db.execute("INSERT INTO stretch SELECT number + ?, name, body FROM stretch WHERE number < ?", (block, PIECE // BLOCK))
    db.execute("COMMIT")
    db.close()
