"""A GRPO step with nothing around it: how fast this machine can do the same mathematics. Nothing here uses lit_rlhf."""
