"""``thinwire demo``: a trainer and two rollout servers that share nothing but a bucket.

The learning half: ``models``, ``tasks``, ``sampling``, ``grpo``, ``recipe``. The processes:
``command`` (options), ``run`` (the coordinator), ``processes`` and ``child`` (its connection to
the others, from both ends), ``worker`` (how they start), ``trainer`` with ``rollouts`` and
``client``, ``server`` with ``api`` and ``completions``. What is told and shown: ``events``,
``ledger``, ``table``, ``display``, ``proof``, ``report`` with ``plots`` and ``charts``.

Nothing outside this package imports it at module level: it needs torch, transformers and, for the
full-size demo, reasoning-gym.
"""
