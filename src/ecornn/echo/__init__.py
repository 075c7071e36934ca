"""Selective recomputation of feature maps, for any PyTorch model: a backend for torch.compile.

Importing this room registers the backend "echo", for sources that were not installed.
"""

from ecornn.echo.backend import FellBack, register
from ecornn.echo.by_name import compiled_by_name
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.report import Report

register()

__all__ = ["FellBack", "NotUnderstood", "Report", "compiled_by_name"]
