"""A member's rounds from joining the run to its end."""
