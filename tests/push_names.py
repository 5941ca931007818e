"""What the tests of push call things."""

TOKEN = "hf_writerwriterwriter"
READER = "hf_readerreaderreader"
REPO = "acme/demo-w4a16"
SOURCE, COMMIT = "google/gemma-demo-qat", "c" * 40
