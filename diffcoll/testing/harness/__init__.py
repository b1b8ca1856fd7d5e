"""What `check_gradients` and `assert_matches_single_process` are made of."""
