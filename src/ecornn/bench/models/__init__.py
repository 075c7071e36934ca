"""Models to measure on, written as their users write them: plain torch, one file each.

Each file has `Size` (a frozen value of everything that can be chosen), `make_model(size)`, whose
`forward(*batch)` returns the loss, and `make_batch(size, batch, generator)`. `tasks` says how each
is trained; `step.make_step` puts a whole training step together.
"""
