"""How many rows a device takes at once: halved when memory runs out, doubled as rows get shorter; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A row of a batch."""

    @property
    def length(self) -> int:
        """Tokens that it may come to."""
        ...


Row = TypeVar("Row", bound=Sized)


class BatchQueue(Generic[Row]):
    """Rows of one kind, longest first, and how many of them are tried at once.

    The longest come first so that a batch that does not fit shows at once, and what is left only gets cheaper.
    """

    def __init__(self, rows: Iterable[Row], *, start: int, limit: int) -> None:
        """`start` rows are tried first, and never more than `limit`."""
        self._rows = deque(sorted(rows, key=lambda row: row.length, reverse=True))
        self._limit = limit
        self.batch_size = min(start, limit)
        self._at = self.longest
        """Length of the longest row when the batch size was last set."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest(self) -> int:
        """Return the length of the longest row that is left, 0 when none is."""
        return self._rows[0].length if self._rows else 0

    def take(self) -> list[Row]:
        """Take the next batch off the queue."""
        while 0 < 2 * self.longest <= self._at and self.batch_size < self._limit:
            # Half the length and twice the rows are as many tokens as before, and less attention.
            self._at //= 2
            self.batch_size = min(2 * self.batch_size, self._limit)
        return [self._rows.popleft() for _ in range(min(self.batch_size, len(self._rows)))]

    def put_back(self, batch: list[Row]) -> bool:
        """Take back a batch that did not fit and halve the size; False where it was one row, which never will."""
        if len(batch) == 1:
            return False
        self._rows.extendleft(reversed(batch))
        self.batch_size = len(batch) // 2
        self._at = self.longest
        return True
