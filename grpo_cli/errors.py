"""The one error that means: a person asked for something that cannot be had, and here is what to do."""


class UserError(Exception):
    """Says what was asked, what was found and what to do. The command line prints it alone and exits with 2."""
