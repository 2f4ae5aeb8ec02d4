"""Whether an error is that of a broken collective, and of which; libraries wrap and reword them."""

import os
import traceback

import torch.distributed as dist

_IN_VAIN = ("timed out", "timeout")
_BROKEN = (*_IN_VAIN, "closed by peer", "reset by peer", "broken pipe", "aborted")


def waited_in_vain(error: BaseException) -> bool:
    """Whether a collective waited to its time limit."""
    return any(word in str(error).lower() for word in _IN_VAIN)


def broken_collective(error: BaseException | None) -> Exception | None:
    """The failed collective behind an error, which libraries may have wrapped in others of theirs.

    Torch's pipeline schedules, for one, raise "[Stage 1] failed to run forward" from it.
    """
    while error is not None:
        text = str(error).lower()
        inside = any("torch/distributed" in frame.filename for frame in _frames(error))
        # Words alone would take a user's "timeout" for one: torch's code has to be on the way, or
        # gloo named.
        broken = any(word in text for word in _BROKEN) and (inside or "gloo" in text)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and broken):
            assert isinstance(error, Exception)
            return error
        # What Python shows as "direct cause", else "during handling of", unless `from None` hid it.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        frame.filename = frame.filename.replace(os.sep, "/")
    return list(frames)


def collective_of(error: BaseException) -> str:
    """The function of `torch.distributed` that an error came out of; else the place in our code.

    A pipeline's sends and receives are waited for in objects that name nothing.
    """
    frames = _frames(error)
    for frame in frames:
        if frame.filename.endswith("torch/distributed/distributed_c10d.py"):
            return frame.name
    ours = [frame for frame in frames if "/megafp8/" in frame.filename]
    if not ours:
        return "a collective"
    name = ours[-1].filename.rpartition("/megafp8/")[2]
    return f"{ours[-1].name} of {name}"
