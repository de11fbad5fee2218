"""Exceptions: one for each way things go wrong, each also a built-in one that callers know."""


class ForebayError(Exception):
    """Base of everything Forebay raises."""


class ArgumentError(ForebayError, ValueError):
    """An argument or setting is wrong."""


class MissingError(ForebayError, FileNotFoundError):
    """A file or folder is not there."""


class AccessError(ForebayError, PermissionError):
    """A file or folder may not be read or written."""


class CorruptError(ForebayError, OSError):
    """Bytes are missing or do not match their checksum."""


class ChangedError(ForebayError, OSError):
    """The data set differs from its catalog."""


class BudgetError(ForebayError, MemoryError):
    """Memory budget, disk or descriptors are used up."""


class StorageError(ForebayError, OSError):
    """Storage does not answer, or answers with an error."""


class DeadlineError(ForebayError, TimeoutError):
    """A wait took longer than it was allowed to."""


class CancelledError(ForebayError, RuntimeError):
    """The object was closed, or belongs to another process."""


class UnsupportedError(ForebayError, NotImplementedError):
    """This build or kernel lacks the feature."""


class InternalError(ForebayError, RuntimeError):
    """A bug in Forebay."""
