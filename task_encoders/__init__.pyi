"""Public names, one a line, for type checkers, editors and `public_names`."""

from task_encoders.captioning import CaptioningEncoder as CaptioningEncoder
from task_encoders.chat import ChatEncoder as ChatEncoder
from task_encoders.classification import ClassificationEncoder as ClassificationEncoder
from task_encoders.contrastive import ContrastiveEncoder as ContrastiveEncoder
from task_encoders.interleaved import InterleavedEncoder as InterleavedEncoder
from task_encoders.language_modeling import LanguageModelingEncoder as LanguageModelingEncoder
from task_encoders.parts.audio_tokens import AudioTokens as AudioTokens
from task_encoders.parts.chat_template import ChatML as ChatML
from task_encoders.parts.chat_template import ChatTemplate as ChatTemplate
from task_encoders.parts.chat_template import OwnTemplate as OwnTemplate
from task_encoders.parts.data_formats import Message as Message
from task_encoders.parts.image_tiles import Buckets as Buckets
from task_encoders.parts.image_tiles import ImageTiles as ImageTiles
from task_encoders.parts.image_tiles import NativeSize as NativeSize
from task_encoders.parts.image_tiles import SplitTiles as SplitTiles
from task_encoders.parts.image_tiles import Tiles as Tiles
from task_encoders.parts.medium import MRope as MRope
from task_encoders.parts.square_crop import SquareCrop as SquareCrop
from task_encoders.parts.token_packing import IGNORED as IGNORED
from task_encoders.parts.tokenizer import Tokenizer as Tokenizer
from task_encoders.parts.video_tokens import VideoFrames as VideoFrames
from task_encoders.parts.video_tokens import VideoTokens as VideoTokens
from task_encoders.parts.vision import Vision as Vision
from task_encoders.speech import SpecAugment as SpecAugment
from task_encoders.speech import SpeechEncoder as SpeechEncoder
