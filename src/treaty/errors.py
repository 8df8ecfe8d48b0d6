"""All errors that Treaty raises on purpose, and warnings.

::

    TreatyError
    ├── ConfigError            a parameter, option or job file is wrong; correct it before starting
    │   └── BudgetSpent        a release would cost a person more than is allowed
    ├── DataError              a table, label or weight cannot be used
    ├── CryptoError            a key, ciphertext or bound is not acceptable
    ├── LocalProtocolError     our own program broke the protocol
    ├── ClusterLost            the party's own cluster lost its workers
    └── PeerError              something another party did or did not do
        ├── PeerProtocolError  it sent a malformed, repeated, unexpected or oversized message
        ├── PeerLost           its process or connection is gone
        ├── PeerTimeout        it is connected but silent for too long
        └── PeerAborted        it stopped the job itself, with a reason

Messages read "expected X, got Y - at Z" and name the party; they never hold labels, keys, ids or values, except cells
that a party has to correct in its own file. Other parties see an error's `public` text alone, without names of columns
and files, and such cells.
"""

import logging
import sys
import warnings
from pathlib import Path

NOTED = logging.INFO + 5
"""Level of messages that a command prints even without ``-v``: its findings in tables, before the work begins."""

_PACKAGE = str(Path(__file__).parent)


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line that called the package, however many of its functions are between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


class TreatyError(Exception):
    """Root of all errors Treaty raises on purpose.

    Parameters
    ----------
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> try:
    ...     treaty.GBDTClassifier("secureboots").fit([[1.0]], [0])
    ... except treaty.TreatyError as error:
    ...     print(type(error).__name__)
    ConfigError
    """

    public: str | None = None

    def __init__(self, message: str, *, public: str | None = None) -> None:
        super().__init__(message)
        self.public = public or self.public


class ConfigError(TreatyError, ValueError):
    """A parameter, option or job file is wrong; nothing has started.

    Parameters
    ----------
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> treaty.GBDTClassifier(n_estimators=0).fit([[1.0]], [0])
    Traceback (most recent call last):
    treaty.errors.ConfigError: option n_estimators=0: expected `int` >= 1
    """

    public = "its job file, options or model cannot be used; it has the details"


class BudgetSpent(ConfigError):
    """A release would cost a person more than is allowed; it was not made."""

    public = "its privacy budget is spent; it has the details"


class DataError(TreatyError, ValueError):
    """A table, label or weight cannot be used; names the party, column and number of rows.

    Parameters
    ----------
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> treaty.GBDTClassifier().fit([[1.0], [2.0]], [0])
    Traceback (most recent call last):
    treaty.errors.DataError: ...
    """

    public = "its table, labels or weights cannot be used; it has the details"


class CryptoError(TreatyError):
    """A key, ciphertext, parameter or overflow bound is not acceptable.

    Parameters
    ----------
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> error = treaty.CryptoError("expected the share that was committed to")
    >>> isinstance(error, treaty.PeerError)  # no party is known to be at fault
    False
    """


class LocalProtocolError(TreatyError):
    """Our own program sent or asked for something the protocol does not allow here.

    Parameters
    ----------
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    It is a fault of the program, or of a system of your own; report it with its text:

    >>> import treaty
    >>> issubclass(treaty.LocalProtocolError, treaty.PeerError)
    False
    """


class ClusterLost(TreatyError):
    """The party's own cluster lost workers faster than they could be replaced."""

    public = "its cluster was lost; it has the details"


class PeerError(TreatyError):
    """Another party did, or failed to do, something.

    Parameters
    ----------
    peer : str
        Name of the party at fault; an attribute of the error, too.
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> def trained(model, tables, y):
    ...     try:
    ...         return model.fit(tables, y, checkpoint="kept")
    ...     except treaty.PeerError as error:
    ...         print(f"{error.peer} ended the training; the same call resumes it")
    """

    def __init__(self, peer: str, message: str, *, public: str | None = None) -> None:
        super().__init__(message, public=public)
        self.peer = peer


class PeerProtocolError(PeerError):
    """The peer sent a message that is malformed, repeated, out of order or oversized; `at` names it, or its field.

    Parameters
    ----------
    peer : str
        Name of the party at fault.
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.
    at : str, default ""
        The message, or its field.

    Examples
    --------
    >>> import treaty
    >>> error = treaty.PeerProtocolError("shop", "expected 3 sums, got 2", "BinSums.values")
    >>> print(error)
    expected 3 sums, got 2 - at BinSums.values from shop
    """

    def __init__(self, peer: str, message: str, at: str = "", *, public: str | None = None) -> None:
        super().__init__(peer, f"{message} - at {at} from {peer}" if at else message, public=public)


class PeerLost(PeerError):
    """The peer's process or connection is gone.

    Parameters
    ----------
    peer : str
        Name of the party at fault.
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> error = treaty.PeerLost("shop", "shop closed the connection")
    >>> error.peer
    'shop'
    """


class PeerAbsent(PeerLost):
    """The peer has not come in time; it may still come."""


class PeerTimeout(PeerError):
    """The peer is connected but did not send what was awaited in time.

    Parameters
    ----------
    peer : str
        Name of the party at fault.
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> error = treaty.PeerTimeout("shop", "shop sent nothing for 60 s")
    >>> isinstance(error, treaty.PeerError)
    True
    """


class PeerAborted(PeerError):
    """The peer stopped the job itself; the message carries its reason.

    Parameters
    ----------
    peer : str
        Name of the party at fault.
    message : str
        What is wrong, where, and what to do.
    public : str or None, default None
        What other parties may see of it; None: the text of the class, or the message itself.

    Examples
    --------
    >>> import treaty
    >>> error = treaty.PeerAborted("shop", "shop: its disk is full")
    >>> print(error)
    shop: its disk is full
    """
