package run

import (
	"bytes"
	"context"
	"io"
	"os"

	"github.com/lockstep-ml/lockstep/cluster/launch"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
)

// Local runs this program with other arguments as the workers of a job on this machine, which cfg describes except for
// its command and outputs. out gets the output of worker 0, the chief, as it is, and that of the others with a prefix.
func Local(ctx context.Context, out io.Writer, cfg launch.Config, args ...string) (err error) {
	if cfg.Command, err = cli.OwnCommand(args...); err != nil {
		return err
	}
	if cfg.Guard, err = cli.OwnCommand(guardCommand); err != nil {
		return err
	}
	shown := make(cli.Readers, 1)
	cfg.ID, cfg.Stdout, cfg.Stderr = cli.JobID("run"), withoutPrefix{shown.Of(out)}, shown.Of(os.Stderr)
	agent, err := launch.New(cfg)
	if err != nil {
		return err
	}
	defer cli.PassOnSignals(agent.Interrupt, shown)()
	outcome, err := agent.Run(ctx)
	if err != nil {
		return err
	}
	return cli.EndWith(outcome.Code)
}

// withoutPrefix writes the lines of worker 0, without the prefix that the launcher puts before each. A write
// holds one or more lines.
type withoutPrefix struct{ io.Writer }

func (w withoutPrefix) Write(lines []byte) (int, error) {
	var text []byte
	for line := range bytes.Lines(lines) {
		text = append(text, bytes.TrimPrefix(line, []byte("[rank0] "))...)
	}
	if _, err := w.Writer.Write(text); err != nil {
		return 0, err
	}
	return len(lines), nil
}
