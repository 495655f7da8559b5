"""Long jobs: a checkpoint's experts into another form."""
