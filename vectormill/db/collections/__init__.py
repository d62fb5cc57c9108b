"""Collections and their generations: made, built anew, swapped, described and removed."""
