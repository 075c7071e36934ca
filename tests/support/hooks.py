"""What a profile must not leave behind."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import optimizer as optimizers


def hooks_of(model: nn.Module) -> list[int]:
    of_modules = [
        len(hooks)
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks_always_called,
        )
    ]
    of_weights = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return of_modules + of_weights


def is_untouched(model: nn.Module) -> bool:
    from torch.autograd import graph

    return (
        not any(hooks_of(model))
        and torch._C._len_torch_dispatch_stack() == 0
        and not optimizers._global_optimizer_pre_hooks
        and not optimizers._global_optimizer_post_hooks
        and torch.autograd._engine_run_backward is graph._engine_run_backward  # type: ignore[attr-defined]
    )
