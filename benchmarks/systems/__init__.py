"""What is measured: our service, our engine alone, and peers, each in processes of its own."""
