package dashboard

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/timeline"
)

// processEvery is how often the recorder of a process is read.
const processEvery = 200 * time.Millisecond

// ListenProcess serves the page about the training of this process, the only one of its job, at an address as in
// [Listen]. The recorder is that of the strategy or the trainer (their method Timeline). The page has the name of the
// program. The caller must close the server.
//
// The launcher serves the page about a job of several processes: lockstep run --dashboard.
func ListenProcess(address string, recorder *timeline.Recorder) (*Server, error) {
	source := &status.Local{Tracker: status.NewTracker(filepath.Base(os.Args[0]), nil), Recorder: recorder}
	s, err := Listen(address, source, "")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.feed.Go(func() { source.Follow(ctx, processEvery) })
	s.feed.Go(func() {
		<-s.done
		cancel()
	})
	return s, nil
}
