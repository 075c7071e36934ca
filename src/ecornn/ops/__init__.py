"""torch.library operators: schema, fake, autograd and vmap rules."""
