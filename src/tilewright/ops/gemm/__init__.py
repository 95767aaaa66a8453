"""Dense matrix products: the public ops, what they share (`operands.py`), and the engines of their backends."""
