"""Reports for people and for other programs: text, a page, pictures, files, and what changed."""

from ecornn.profiler.render.difference import Change, Difference, compare
from ecornn.profiler.render.export import to_csv, to_trace
from ecornn.profiler.render.page import to_html
from ecornn.profiler.render.text import as_text
from ecornn.profiler.render.write import write, write_difference

__all__ = [
    "Change",
    "Difference",
    "as_text",
    "compare",
    "to_csv",
    "to_html",
    "to_trace",
    "write",
    "write_difference",
]
