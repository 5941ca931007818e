"""What can go wrong in a way the user can mend."""


class QatpackError(Exception):
    """Base of every error that is the user's to act on.

    The message says what was found, where (file, tensor, row) and what to do next. The command
    line prints it as it is and exits with 1; anything else is a fault of ours and keeps its
    traceback.
    """


class CheckpointError(QatpackError):
    """A checkpoint's files are damaged, inconsistent or not what they claim to be."""


class SourceError(QatpackError):
    """A source cannot be found or reached: a missing folder, a private or gated repository."""


class OutputError(QatpackError):
    """The output cannot be written: not empty, same as the source, no space, no permission."""


class GridError(QatpackError):
    """The proof failed: values that are on no 4-bit grid, or not finite."""


class ModelError(QatpackError):
    """A model that the decoder cannot run: unknown type, unsupported option, tensors missing."""


class PushError(QatpackError):
    """The Hub refuses a push, cannot be reached, or holds something else than was sent."""
