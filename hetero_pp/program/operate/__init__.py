"""What an operator asks for beside a run: metrics, health and traces, all derived from the run's reports."""
