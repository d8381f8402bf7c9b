package main

import (
	"context"
	"os"
)

func Example() {
	if err := run(context.Background(), os.Stdout); err != nil {
		panic(err)
	}
	// Output:
	// BatchNorm      loss on 1 replica and on 4 within 1e-5: false
	// SyncBatchNorm  loss on 1 replica and on 4 within 1e-5: true
}
