"""What checks of the Python face share."""

from torch.distributed.tensor import DTensor


def full(t):
    """The whole tensor of a sharded one; any other as it is."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def what_torch_does(call):
    """"works", or the first line of its error."""
    try:
        call()
        return "works"
    except Exception as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


def expect_error(kinds, words, call):
    try:
        call()
    except kinds as e:
        assert all(w in str(e) for w in words), str(e)
        return
    raise AssertionError(f"no error with {words}")
