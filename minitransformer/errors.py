"""The two errors that this package raises on purpose."""


class InputError(ValueError):
    """Bad input from a user: one line that says what was wrong, where, and what to do. The CLI exits with status 2."""


class UnsupportedDevice(RuntimeError):
    """A tensor lies on a device for which an operator has no kernel; nothing falls back silently."""
