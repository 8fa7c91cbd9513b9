"""The base of modules with packed tables.

From the lowest layer: ``layout`` (positions of tables), ``optimizer_state``, ``holders`` and ``optimizers``
(other owners of the Parameters), ``parameters`` (creates the Parameters), ``pooling``, ``state_dict``,
``table`` and ``tables`` (the interface by table), ``module``.
"""
