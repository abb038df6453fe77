/* Queues of the fake device: tasks given to a stream run later, in order, in the stream's thread. */
#ifndef FAKE_STREAMS_H
#define FAKE_STREAMS_H

/* Runs `run(argument)` after all earlier tasks of the stream. If it returns a code, no later task runs. */
void stream_hand(void *stream, int (*run)(void *), void *argument);

/* Waits until all tasks given to the stream are done. Returns 0, or the code returned by a task. */
int stream_wait(void *stream);

/* The same for all streams. */
int streams_wait(void);

#endif
