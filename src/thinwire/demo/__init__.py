"""The learning half of ``thinwire demo``: a model, a checked task, sampling and a GRPO step.

Nothing outside this package imports it at module level: it needs torch, transformers and, for the
full-size demo, reasoning-gym.
"""
