"""What is learned: a task builds model and loaders and gives the engine a loss and an evaluation."""
