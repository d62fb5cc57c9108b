"""Facts: what the pages of the console show, gathered from what others read and said in words. Render nothing."""
