"""Steps that were predicted and steps that were measured."""
