"""The one exception type that a user is meant to read."""


class GeomlibError(Exception):
    """A fault that the user can mend.

    The message is one sentence that names what is wrong and says what to do next. The command line prints it without
    a traceback and exits with code 2; in a notebook or script it is an ordinary exception.
    """
