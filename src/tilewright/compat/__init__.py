"""Other libraries' names and signatures on top of our ops: code written for them runs with a changed import."""
