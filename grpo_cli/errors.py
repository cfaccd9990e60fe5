"""The one error that means: a person asked for something that cannot be had, and here is what to do. And how to know
that what could not be had was memory."""


class UserError(Exception):
    """Says what was asked, what was found and what to do. The command line prints it alone and exits with 2."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, on the host in PyTorch, or in Python. Asks no library to be loaded."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = ("CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
