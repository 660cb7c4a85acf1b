"""Training of one member: a whole replica, or one stage of it."""
