"""What modules with packed tables stand on. From below: ``layout`` (where tables lie), ``optimizer_state``,
``holders`` and ``optimizers`` (what else has the Parameters), ``parameters`` (which makes them), ``pooling``,
``state_dict``, ``table`` and ``tables`` (which speak of tables), ``module``.
"""
