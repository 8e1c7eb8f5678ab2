"""Tells SIGHUP of a terminal that closed from SIGHUP that asks to read the configuration anew."""

import os


class Terminal:
    """The terminal that this process had when this was made, if any."""

    def __init__(self) -> None:
        self._was_there = has_terminal()

    @property
    def is_closed(self) -> bool:
        """Whether there was one, and it is gone."""
        return self._was_there and not has_terminal()


def has_terminal() -> bool:
    """Whether this process has a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
