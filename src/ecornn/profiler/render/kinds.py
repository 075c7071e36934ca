"""How every view shows kinds and names: the same colours, and no character that is not seen."""

from __future__ import annotations

from ecornn.profiler.model import KINDS

#: Colours that differ for colour-blind readers and, mostly, in grey (after Okabe and Ito).
COLOURS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer state": "#009e73",
    "feature maps": "#e69f00",
    "workspace": "#f0e442",
    "inputs": "#cc79a7",
    "other": "#999999",
    "rounding": "#d5d5d5",
    "no tensor": "#d55e00",
    "reserved, unused": "#eeeeee",
    "driver": "#bbbbbb",
}
assert tuple(COLOURS) == KINDS

OUTSIDE = "(no module)"


def shown(text: str) -> str:
    """Names come from users: what could move a cursor or hide is shown as its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def module_text(path: str) -> str:
    return shown(path) or OUTSIDE
