"""Any callable in; seconds, bytes, flops out."""
