// This program writes the vector loops of package kernel for arm64, their declarations and the Go table of them, in the
// folder that is its argument. Run it with go generate in internal/kernel.
package main

import (
	"log"
	"os"
	"path/filepath"

	"github.com/lockstep-ml/lockstep/internal/kernel/_gen/kinds"
	. "github.com/lockstep-ml/lockstep/internal/kernel/_gen/neon"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: arm64 FOLDER")
	}
	folder := os.Args[1]
	writeLoops()
	for _, err := range []error{
		Write(folder, "kernel"),
		kinds.WriteTable(filepath.Join(folder, "table_arm64.go"),
			kinds.Set{Name: "neonLoops", File: "neon_arm64.s", Switch: "scaleNEON", Lacks: "prodI64"}),
	} {
		if err != nil {
			log.Fatal(err)
		}
	}
}
