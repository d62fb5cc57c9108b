"""What a plan says about itself: sentences, and a drawing."""
