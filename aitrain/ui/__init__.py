"""What people see of a run: terminal, report page, local page server, model card."""
