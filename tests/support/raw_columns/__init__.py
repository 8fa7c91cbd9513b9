"""What the tests of gradients and updates on a GPU share."""
