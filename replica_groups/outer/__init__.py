"""A member's side of the outer round."""
