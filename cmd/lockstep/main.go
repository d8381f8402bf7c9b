// Command lockstep trains models on several replicas in lock-step, and measures how fast that is. Run "lockstep help".
package main

import "os"

func main() { os.Exit(run(os.Args[1:])) }
