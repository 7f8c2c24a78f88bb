"""Where (epoch, last quorum) of each job survive a restart of the Lighthouse (rule L1)."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from pathlib import Path
from typing import Protocol

from lighthouse import wire
from lighthouse.core.words import Record
from lighthouse.messages import Process
from lighthouse.pb import lighthouse_pb2 as pb

SCHEMA_VERSION = 3
OLDER_VERSION = 2
"""Without ``gone``, and with epochs that are seconds; what it holds is taken over."""
LOCK_TIMEOUT_S = 5.0


class StorageError(RuntimeError):
    """The store cannot be used; the text says why and what to do."""


class Storage(Protocol):
    """One record a job; every write is conditional, so that of two Lighthouses the older one notices."""

    def load(self, job_id: str) -> Record | None:
        """What is stored of ``job_id``; raises StorageError."""
        ...

    def epoch(self, job_id: str) -> int | None:
        """The epoch alone of what is stored of ``job_id``; raises StorageError."""
        ...

    def store(self, job_id: str, expected_epoch: int | None, record: Record) -> bool:
        """Write ``record`` if the stored epoch is ``expected_epoch`` (None: nothing is stored).

        Returns False, and writes nothing, if it is not. The record is safe on disk when this returns True.
        Raises StorageError.
        """
        ...

    def close(self) -> None:
        """Release the store."""
        ...


class MemoryStorage:
    """Forgets everything when the process ends; members report the running quorum to the next one (rule R2)."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._lock = threading.Lock()

    def load(self, job_id: str) -> Record | None:
        """See Storage."""
        with self._lock:
            return self._records.get(job_id)

    def epoch(self, job_id: str) -> int | None:
        """See Storage."""
        record = self.load(job_id)
        return record.epoch if record is not None else None

    def store(self, job_id: str, expected_epoch: int | None, record: Record) -> bool:
        """See Storage."""
        with self._lock:
            stored = self._records.get(job_id)
            if (stored.epoch if stored is not None else None) != expected_epoch:
                return False
            self._records[job_id] = record
            return True

    def close(self) -> None:
        """See Storage."""


class SqliteStorage:
    """One SQLite file; two Lighthouses may open it, the conditional write keeps them apart.

    Args:
        path: the file; its folder is made if need be.

    Raises:
        StorageError: the file cannot be opened or was written by another version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
            self._database.execute("PRAGMA synchronous = FULL")
            self._create()
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"the store {path} cannot be opened: {error}; give another --store") from error

    def _create(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, OLDER_VERSION, SCHEMA_VERSION):
            raise StorageError(
                f"the store {self._path} has version {version}, this Lighthouse knows {SCHEMA_VERSION}: "
                "use the Lighthouse that wrote it, or give another --store"
            )
        if version == OLDER_VERSION:
            self._database.execute("ALTER TABLE job ADD COLUMN gone TEXT NOT NULL DEFAULT '[]'")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS job (job_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, quorum BLOB,"
            " ended INTEGER NOT NULL, gone TEXT NOT NULL)"
        )
        self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._database.execute("COMMIT")

    def load(self, job_id: str) -> Record | None:
        """See Storage."""
        try:
            row = self._database.execute(
                "SELECT epoch, quorum, ended, gone FROM job WHERE job_id = ?", (job_id,)
            ).fetchone()
            if row is None:
                return None
            quorum = pb.Quorum.FromString(row[1]) if row[1] is not None else None
            gone = tuple((Process(name, incarnation), why) for name, incarnation, why in json.loads(row[3]))
            return Record(row[0], wire.quorum_in(quorum) if quorum is not None else None, bool(row[2]), gone)
        except (sqlite3.Error, wire.WireError, wire.DecodeError, ValueError) as error:
            raise StorageError(f"the store {self._path} cannot be read: {error}") from error

    def epoch(self, job_id: str) -> int | None:
        """See Storage."""
        try:
            row = self._database.execute("SELECT epoch FROM job WHERE job_id = ?", (job_id,)).fetchone()
        except sqlite3.Error as error:
            raise StorageError(f"the store {self._path} cannot be read: {error}") from error
        return row[0] if row is not None else None

    def store(self, job_id: str, expected_epoch: int | None, record: Record) -> bool:
        """See Storage."""
        quorum = wire.quorum_out(record.q_last).SerializeToString() if record.q_last is not None else None
        gone = json.dumps([(process.replica_id, process.incarnation, why) for process, why in record.gone])
        values = (record.epoch, quorum, record.ended, gone)
        try:
            if expected_epoch is None:
                cursor = self._database.execute(
                    "INSERT OR IGNORE INTO job (job_id, epoch, quorum, ended, gone) VALUES (?, ?, ?, ?, ?)",
                    (job_id, *values),
                )
            else:
                cursor = self._database.execute(
                    "UPDATE job SET epoch = ?, quorum = ?, ended = ?, gone = ? WHERE job_id = ? AND epoch = ?",
                    (*values, job_id, expected_epoch),
                )
        except sqlite3.Error as error:
            raise StorageError(f"the store {self._path} cannot be written: {error}") from error
        return cursor.rowcount == 1

    def close(self) -> None:
        """See Storage."""
        self._database.close()


def default_path(port: int) -> Path:
    """The store of a Lighthouse on ``port``, in the user's folder for state (XDG)."""
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return folder / "torchft_plus" / f"lighthouse-{port}.sqlite"
