"""What a run tells while it runs and when it is over: state, metrics, summary, pictures, the live view."""
