"""What makes the planner's constants and the tables of its errors, from published runs; nobody who plans runs it."""
